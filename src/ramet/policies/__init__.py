"""Who answers: a model in the process, or a script."""
