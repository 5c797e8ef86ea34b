"""Text from a model: sampling under the layout it trains in."""
