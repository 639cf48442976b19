"""A generative film recommender on MovieLens-100K, from ratings to a Qwen3.5 hybrid checkpoint."""
