"""Tests, laid out as the packages they test; shared helpers lie beside them."""
