"""Datasets that are known by name: `catalogue` lists them, `download` copies or downloads them,
`load` finds and reads them."""
