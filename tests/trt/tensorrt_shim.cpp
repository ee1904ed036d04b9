// The six symbols of TensorRT's builder and parser libraries that its Python bindings want and the lean runtime lacks.
// Nothing can be built with them: a Builder made here is null, and the bindings say so.
extern "C" {

void* getPluginRegistry();  // the lean runtime's

void* getBuilderPluginRegistry(int) { return getPluginRegistry(); }
void* createInferBuilder_INTERNAL(void*, int) { return nullptr; }
void* createNvOnnxParser_INTERNAL(void*, void*, int) { return nullptr; }
void* createNvOnnxParserRefitter_INTERNAL(void*, void*, int) { return nullptr; }
int getNvOnnxParserVersion() { return 0; }
bool initLibNvInferPlugins(void*, char const*) { return true; }
}
