"""Operations on an outbox for operators: inspect, intervene, prune, check, repair, copy."""
