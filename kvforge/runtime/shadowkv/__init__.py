"""ShadowKV at run time: which pages a factored sequence has, and what is computed into them."""
