"""The RabbitMQ publisher that keeps its word."""
