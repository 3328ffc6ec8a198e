"""What is done with a trained model: texts, scores, a server."""
