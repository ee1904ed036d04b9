// The text by which plugins/library.py recognises this library and its sources without loading it.
extern "C" __attribute__((visibility("default"), used)) const char kvforge_operators_marker[] = KVFORGE_MARKER;
