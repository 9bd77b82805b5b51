"""Rules of our house for pediag, one file each, in folders by family."""
