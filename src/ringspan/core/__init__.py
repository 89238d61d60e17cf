"""Attention geometry and schedules: integer arithmetic and the float64 oracle, without any framework."""
