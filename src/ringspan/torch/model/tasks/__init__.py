"""Models by task: language models, classifiers, hidden states, log-probabilities."""
