"""Does a model use its context? Retrieval, tracing, aggregation and perplexity at full length, and lm-eval's tasks."""
