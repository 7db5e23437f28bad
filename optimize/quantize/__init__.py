"""Weight quantization: a scheme chooses integers and scales; :mod:`.grid` says what they mean and how to store them."""
