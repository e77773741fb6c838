"""`allstep plan`: its options, the plan of a recipe, and the way to a goal."""
