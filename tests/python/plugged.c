/* Stands in for libfraglab.so: keeps what it is told, and counts the texts it has given out. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char told[65536];
static int texts;

static char *text(const char *content) {
    char *copy = malloc(strlen(content) + 1);
    texts++;
    return strcpy(copy, content);
}

static void tell(const char *kind, const char *what) {
    size_t used = strlen(told);
    snprintf(told + used, sizeof told - used, "%s %s\n", kind, what);
}

int fraglab_torch_interface(void) { return getenv("STUB_INTERFACE") ? 99 : 1; }
const char *fraglab_torch_version(void) {
    const char *version = getenv("STUB_VERSION");
    return version ? version : "0.0.0";
}
char *fraglab_torch_configure(const char *settings) {
    tell("configure", settings);
    return strstr(settings, "nonsense") ? text("alloc=nonsense: expected one of caching") : NULL;
}
char *fraglab_torch_stats(int device) {
    if (device == -1)
        return text("[{\"mode\": \"alloc\"}]");
    return text("{\"current\": {\"reserved_bytes\": 7, \"allocated_bytes\": 5},"
                " \"peaks\": {\"reserved_bytes_peak\": 11, \"allocated_bytes_peak\": 9}}");
}
void fraglab_torch_reset_peaks(int device) {
    char number[16];
    snprintf(number, sizeof number, "%d", device);
    tell("reset_peaks", number);
}
void fraglab_torch_mark(const char *phase) { tell("mark", phase); }
void fraglab_torch_module_enter(const char *module) { tell("enter", module); }
void fraglab_torch_module_leave(const char *module) { tell("leave", module); }
char *fraglab_torch_finish(void) { return getenv("STUB_FULL") ? text("disk full") : NULL; }
void fraglab_torch_release_text(char *content) {
    texts--;
    free(content);
}
void *fraglab_torch_alloc(size_t size, int device, void *stream) { return NULL; }
void fraglab_torch_free(void *ptr, size_t size, int device, void *stream) {}
void fraglab_torch_init(int devices) {}
void fraglab_torch_reset(void) {}
void fraglab_torch_memory_fraction(double fraction, int device) {}
void fraglab_torch_record_stream(void *ptr, void *stream) {}
void *fraglab_torch_base_alloc(void *ptr, size_t *size) { return NULL; }
/* What PyTorch passes beside the device does not matter here: nobody calls these. */
void fraglab_torch_pool_begin(int device) {}
void fraglab_torch_pool_end(int device) {}
void fraglab_torch_pool_release(int device) {}

/* For the test alone. */
const char *stub_told(void) { return told; }
int stub_texts(void) { return texts; }
