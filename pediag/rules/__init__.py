"""The rules: one file each, in folders by family. See :mod:`pediag.rules.registry` for how they are found."""
