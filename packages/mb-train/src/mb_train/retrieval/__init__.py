"""Finding texts: BM25, exact and FAISS search over embeddings, an index of a run's blocks."""
