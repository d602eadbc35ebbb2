"""What several methods share: one file for each family. They are held to the rules of a method."""
