"""Shadow models: training on random halves of the candidates, and what attacks observe of them."""
