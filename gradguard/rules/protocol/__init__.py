"""Step-protocol rules (GG6xx): gradients that are not made, used and cleared as the loop means them to be."""
