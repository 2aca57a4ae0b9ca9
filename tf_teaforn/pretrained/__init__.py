"""Models from elsewhere: an importer a family, behind `importers.open_folder`."""
