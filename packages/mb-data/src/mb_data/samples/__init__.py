"""From tokens to training samples: GPT's, BERT's, T5's and ICT's, mixed and indexed."""
