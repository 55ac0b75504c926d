"""The training loop: an engine, made from a module and a config, that runs backwards and steps and saves itself."""
