"""The PyTorch back end: carries out on process groups what ``ringspan.core`` decides."""
