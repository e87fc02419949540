//! The functions of the C interface, as the [room's docs](super) list them.
//!
//! No panic crosses into C: each call is caught, said on standard error, and answered with what
//! means "no" there. Exceptions are thrown when nothing of Rust is left to be dropped.

use std::any::Any;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};

use super::devices;
use super::graphs::Filter;

/// Version of the interface.
const INTERFACE_VERSION: c_int = 1;

/// The version of fraglab, for C.
const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");

// Behind these stands `throw.cpp`.
unsafe extern "C-unwind" {
    fn fraglab_throw(text: *const c_char, length: usize, is_memory: bool) -> !;
}

unsafe extern "C" {
    fn fraglab_filter_copy(filter: *const c_void) -> *mut c_void;
    fn fraglab_filter_picks(filter: *const c_void, stream: *mut c_void) -> bool;
    fn fraglab_filter_drop(filter: *mut c_void);
}

/// Says something on standard error; a closed one is nobody's fault.
pub(super) fn warn(text: &str) {
    use std::io::Write as _;
    drop(writeln!(std::io::stderr(), "fraglab: {text}"));
}

/// Runs a call so that no panic leaves it.
///
/// # Errors
/// What the panic said.
#[inline]
fn guarded<T>(call: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(call)).map_err(|panic| panicked(&*panic))
}

#[cold]
fn panicked(panic: &(dyn Any + Send)) -> String {
    let said = panic.downcast_ref::<String>().map(String::as_str);
    let said = said.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
    format!("error inside fraglab, please report it: {said}")
}

/// Runs a call that has nothing to answer.
fn quietly(call: impl FnOnce()) {
    if let Err(error) = guarded(call) {
        warn(&error);
    }
}

/// A text for C, which hands it to [`fraglab_torch_release_text`].
fn owned(text: String) -> *mut c_char {
    // A zero byte inside would end it early.
    CString::new(text.replace('\0', " ")).map_or(null_mut(), CString::into_raw)
}

/// Null, or what is wrong.
fn answer(outcome: Result<Result<(), String>, String>) -> *mut c_char {
    match outcome.and_then(|it| it) {
        Ok(()) => null_mut(),
        Err(error) => owned(error),
    }
}

/// A text from C; nothing for null.
///
/// # Safety
/// `text` is null, or ends with a zero byte and stays as it is during the call.
unsafe fn given<'a>(text: *const c_char) -> Option<std::borrow::Cow<'a, str>> {
    if text.is_null() {
        return None;
    }
    // SAFETY: the caller's promise.
    Some(unsafe { CStr::from_ptr(text) }.to_string_lossy())
}

/// Why a request was refused.
enum Refused {
    Memory(String),
    Other(String),
}

/// Hands out a block. Throws if there is none.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn fraglab_torch_alloc(
    size: usize,
    device: c_int,
    stream: *mut c_void,
) -> *mut c_void {
    if size == 0 {
        return null_mut();
    }
    let outcome = guarded(|| {
        let mut server = devices::server(device).map_err(Refused::Other)?;
        server.alloc(size as u64, stream as u64).map_err(Refused::Memory)
    });
    let refused = match outcome {
        Ok(Ok(address)) => return address as *mut c_void,
        Ok(Err(refused)) => refused,
        Err(panic) => Refused::Other(panic),
    };
    throw(refused)
}

/// Throws. The text is the exception's before it flies, so that nothing is left to be dropped.
#[cold]
fn throw(refused: Refused) -> ! {
    let (text, is_memory) = match refused {
        Refused::Memory(text) => (text, true),
        Refused::Other(text) => (text, false),
    };
    // SAFETY: the pointer and the length are those of a text that lives until the unwinding, which
    // drops it, has passed this frame; the other side copies it first.
    unsafe { fraglab_throw(text.as_ptr().cast(), text.len(), is_memory) }
}

/// Takes a block back. Null is nothing; a pointer that is not ours is warned of once.
#[unsafe(no_mangle)]
pub extern "C" fn fraglab_torch_free(
    pointer: *mut c_void,
    _size: usize,
    device: c_int,
    _stream: *mut c_void,
) {
    if pointer.is_null() {
        return;
    }
    quietly(|| {
        let freed = devices::known(device).is_some_and(|mut it| it.free(pointer as u64));
        if !freed {
            unknown_pointer(pointer, device);
        }
    });
}

#[cold]
fn unknown_pointer(pointer: *mut c_void, device: c_int) {
    static WARNED: AtomicBool = AtomicBool::new(false);
    if !WARNED.swap(true, Ordering::Relaxed) {
        warn(&format!(
            "{pointer:p} on device {device} is no block of fraglab's, or was freed before: ignored \
             (further ones are not told)"
        ));
    }
}

/// PyTorch begins to use GPUs. They are opened one by one when memory is first asked for.
#[unsafe(no_mangle)]
pub extern "C" fn fraglab_torch_init(_device_count: c_int) {}

/// `torch.cuda.empty_cache()`, on every device in use.
#[unsafe(no_mangle)]
pub extern "C" fn fraglab_torch_reset() {
    quietly(|| devices::for_each(|server| server.empty_cache()));
}

/// `torch.cuda.set_per_process_memory_fraction`.
#[unsafe(no_mangle)]
pub extern "C" fn fraglab_torch_memory_fraction(fraction: f64, device: c_int) {
    quietly(|| {
        if (0.0..=1.0).contains(&fraction) {
            devices::set_fraction(device, fraction);
        } else {
            warn(&format!("memory fraction {fraction}: expected 0 to 1; ignored"));
        }
    });
}

/// The block that holds an address: its first address, and its size.
///
/// # Safety
/// `size` is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fraglab_torch_base_alloc(
    pointer: *mut c_void,
    size: *mut usize,
) -> *mut c_void {
    let mut found = None;
    quietly(|| {
        devices::for_each(|server| found = found.or_else(|| server.base(pointer as u64)));
    });
    let (address, size_bytes) = found.unwrap_or((0, 0));
    if !size.is_null() {
        // SAFETY: the caller's promise.
        unsafe { size.write(size_bytes as usize) };
    }
    address as *mut c_void
}

/// A stream beside its own uses a block.
#[unsafe(no_mangle)]
pub extern "C" fn fraglab_torch_record_stream(pointer: *mut c_void, stream: *mut c_void) {
    if pointer.is_null() {
        return;
    }
    quietly(|| {
        let mut found = false;
        devices::for_each(|server| {
            found = found || server.record_stream(pointer as u64, stream as u64);
        });
        if !found {
            unknown_pointer(pointer, -1);
        }
    });
}

/// A `std::function` of PyTorch, copied.
struct TorchFilter(*mut c_void);

// SAFETY: PyTorch's own allocator calls these functions from whichever thread allocates, under a
// lock, as is done here.
unsafe impl Send for TorchFilter {}

impl Filter for TorchFilter {
    fn picks(&self, stream: u64) -> bool {
        // SAFETY: the pointer came from `fraglab_filter_copy` and is dropped with `self` only.
        unsafe { fraglab_filter_picks(self.0, stream as *mut c_void) }
    }
}

impl Drop for TorchFilter {
    fn drop(&mut self) {
        // SAFETY: as above; this is the one time.
        unsafe { fraglab_filter_drop(self.0) }
    }
}

/// A graph is captured. The pair of a pool's name comes as two numbers, the function by reference:
/// so the platforms' calling conventions have it.
///
/// # Safety
/// `filter` points to a `std::function<bool(cudaStream_t)>`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fraglab_torch_pool_begin(
    device: c_int,
    first: u64,
    second: u64,
    filter: *const c_void,
) {
    quietly(|| {
        // SAFETY: the caller's promise.
        let copy = unsafe { fraglab_filter_copy(filter) };
        if copy.is_null() {
            return warn("no memory for the filter of a graph's streams: its pool is not used");
        }
        let filter = Box::new(TorchFilter(copy));
        match devices::server(device) {
            Ok(mut server) => server.pool_begin((first, second), filter),
            Err(error) => warn(&error),
        }
    });
}

/// The capture ends.
#[unsafe(no_mangle)]
pub extern "C" fn fraglab_torch_pool_end(device: c_int, first: u64, second: u64) {
    quietly(|| {
        if let Some(mut server) = devices::known(device) {
            server.pool_end((first, second));
        }
    });
}

/// The graph is gone.
#[unsafe(no_mangle)]
pub extern "C" fn fraglab_torch_pool_release(device: c_int, first: u64, second: u64) {
    quietly(|| {
        if let Some(mut server) = devices::known(device) {
            server.pool_release((first, second));
        }
    });
}

/// The version of fraglab.
#[unsafe(no_mangle)]
pub extern "C" fn fraglab_torch_version() -> *const c_char {
    VERSION.as_ptr().cast()
}

/// The version of this interface.
#[unsafe(no_mangle)]
pub extern "C" fn fraglab_torch_interface() -> c_int {
    INTERFACE_VERSION
}

/// Takes settings. Null, or what is wrong with them.
///
/// # Safety
/// `settings` is null or a text that ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fraglab_torch_configure(settings: *const c_char) -> *mut c_char {
    // SAFETY: the caller's promise.
    let text = unsafe { given(settings) }.unwrap_or_default();
    answer(guarded(|| devices::configure(&text)))
}

/// Statistics as JSON; `{"error": ...}` if there are none.
#[unsafe(no_mangle)]
pub extern "C" fn fraglab_torch_stats(device: c_int) -> *mut c_char {
    let text = guarded(|| devices::stats(device)).and_then(|it| it);
    owned(text.unwrap_or_else(|error| serde_json::json!({ "error": error }).to_string()))
}

/// Peaks begin anew.
#[unsafe(no_mangle)]
pub extern "C" fn fraglab_torch_reset_peaks(device: c_int) {
    quietly(|| {
        if device < 0 {
            devices::for_each(|server| server.reset_peaks());
        } else if let Some(mut server) = devices::known(device) {
            server.reset_peaks();
        }
    });
}

/// A phase begins, on every device in use and on those that come.
///
/// # Safety
/// `phase` is null or a text that ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fraglab_torch_mark(phase: *const c_char) {
    // SAFETY: the caller's promise.
    let Some(phase) = (unsafe { given(phase) }) else { return };
    quietly(|| devices::mark(&phase));
}

/// The program enters a module, on every device in use.
///
/// # Safety
/// `module` is null or a text that ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fraglab_torch_module_enter(module: *const c_char) {
    // SAFETY: the caller's promise.
    let Some(module) = (unsafe { given(module) }) else { return };
    quietly(|| devices::for_each(|server| server.module(&module, true)));
}

/// The program leaves a module.
///
/// # Safety
/// `module` is null or a text that ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fraglab_torch_module_leave(module: *const c_char) {
    // SAFETY: the caller's promise.
    let Some(module) = (unsafe { given(module) }) else { return };
    quietly(|| devices::for_each(|server| server.module(&module, false)));
}

/// Writes traces and the log. Null, or what is wrong.
#[unsafe(no_mangle)]
pub extern "C" fn fraglab_torch_finish() -> *mut c_char {
    answer(guarded(|| devices::finish(true)))
}

/// Releases a text of this interface.
///
/// # Safety
/// `text` is null or came from this interface and was not released.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fraglab_torch_release_text(text: *mut c_char) {
    if !text.is_null() {
        // SAFETY: the caller's promise: it came from `owned`.
        drop(unsafe { CString::from_raw(text) });
    }
}

/// Has the traces and the log written when the process ends in an orderly way.
pub(super) fn finish_at_exit() {
    extern "C" fn at_exit() {
        // The driver is gone by then: it is not asked.
        match guarded(|| devices::finish(false)).and_then(|it| it) {
            Ok(()) => {}
            Err(error) => warn(&error),
        }
    }
    // SAFETY: registers a function that lives as long as the library, which Rust never unloads.
    let refused = unsafe { libc::atexit(at_exit) } != 0;
    if refused {
        warn("no trace and no statistics will be written at the end: call fraglab_torch_finish");
    }
}
