"""What tests share: real things made small."""
