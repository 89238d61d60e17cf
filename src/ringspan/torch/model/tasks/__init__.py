"""Models by what they are for: language models, classifiers, hidden states, log-probabilities."""
