"""Who attends to what, and when: integer arithmetic and the float64 oracle, without any framework."""
