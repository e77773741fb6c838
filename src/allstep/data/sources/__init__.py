"""Where samples come from: each kind of source in its own file, all with the interface of `source`;
`opening` chooses by looking."""
