"""Shadow models: configuration, training, storage and what attacks observe of them."""
