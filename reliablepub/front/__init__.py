"""What applications import: `Publisher` for threads, `AsyncPublisher` for asyncio, receipts."""
