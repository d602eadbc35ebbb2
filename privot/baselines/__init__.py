"""Methods without a mechanism, to compare with. One file, one method; their releases say `NoGuarantee`."""
