//! The allocator inside: whatever is not planned goes to one of the others.
//!
//! The owner hands out its own handles and lends the inner allocator an [`InnerEnv`], which knows
//! whose a handle is:
//!
//! ```text
//!   engine ── Handle of the owner ──> owner ── its own memory
//!                                       └── Handle of the inner allocator ──> Inner
//! ```

use std::collections::VecDeque;

use crate::alloc::best_fit::{BestFit, FirstFit};
use crate::alloc::bfc::Bfc;
use crate::alloc::caching::Caching;
use crate::alloc::native::Native;
use crate::alloc::spec::{AllocSpec, Params, SpecError};
use crate::alloc::stitch::Stitch;
use crate::alloc::{
    Action, ActionKind, Allocator, BuildInputs, Env, Handle, LayoutBlock, Levels, OutOfMemory,
    Request,
};
use crate::units::{PoolId, StreamId};

/// Expands to [`Inner`], how it is built, and how it is called.
macro_rules! inner {
    ($($name:literal, $variant:ident($type:ty), $build:path;)*) => {
        /// One of the allocators that can serve inside another.
        #[derive(Clone, Debug)]
        #[expect(clippy::large_enum_variant, reason = "there is one a replay")]
        pub(super) enum Inner {
            $(
                #[doc = concat!("`", $name, "`.")]
                $variant($type),
            )*
        }

        /// Names of the allocators that can serve inside.
        const NAMES: &[&str] = &[$($name),*];

        fn build(spec: &AllocSpec, inputs: &BuildInputs) -> Result<Inner, SpecError> {
            let params = Params::new(spec);
            match spec.name.as_str() {
                $($name => Ok(Inner::$variant($build(params, inputs)?)),)*
                _ => Err(SpecError::UnknownAllocator {
                    name: spec.name.clone(),
                    known: NAMES.join(", "),
                    hint: "; these can serve inside another".to_owned(),
                }),
            }
        }

        macro_rules! delegate {
            ($inner:expr, $allocator:ident => $call:expr) => {
                match $inner { $(Inner::$variant($allocator) => $call,)* }
            };
        }
    };
}

inner! {
    "caching", Caching(Caching), Caching::build;
    "best-fit", BestFit(BestFit), BestFit::build;
    "first-fit", FirstFit(FirstFit), FirstFit::build;
    "bfc", Bfc(Bfc), Bfc::build;
    "native", Native(Native), Native::build;
    "stitch", Stitch(Stitch), Stitch::build;
}

impl Inner {
    /// Builds it from `NAME[+key=value]...`, in brackets or not; `expandable` is caching with
    /// expandable segments.
    ///
    /// # Errors
    /// As building that allocator by itself.
    pub(super) fn build(text: &str, inputs: &BuildInputs) -> Result<Inner, SpecError> {
        let mut spec = AllocSpec::nested(text)?;
        if spec.name == "expandable" {
            spec.name = "caching".to_owned();
            spec.params.push(("expandable_segments".to_owned(), "True".to_owned()));
        }
        build(&spec, inputs)
    }

    pub(super) fn malloc<E: Env>(
        &mut self,
        env: &mut InnerEnv<'_, E>,
        request: Request,
    ) -> Result<Handle, OutOfMemory> {
        delegate!(self, inner => inner.malloc(env, request))
    }

    pub(super) fn free<E: Env>(&mut self, env: &mut InnerEnv<'_, E>, handle: Handle) {
        delegate!(self, inner => inner.free(env, handle))
    }

    pub(super) fn defer<E: Env>(&mut self, env: &mut InnerEnv<'_, E>, handle: Handle) {
        delegate!(self, inner => inner.defer(env, handle))
    }

    pub(super) fn empty_cache<E: Env>(&mut self, env: &mut InnerEnv<'_, E>) {
        delegate!(self, inner => inner.empty_cache(env))
    }

    pub(super) fn pool_enter<E: Env>(&mut self, env: &mut InnerEnv<'_, E>, pool: PoolId) {
        delegate!(self, inner => inner.pool_enter(env, pool))
    }

    pub(super) fn pool_leave<E: Env>(&mut self, env: &mut InnerEnv<'_, E>, pool: PoolId) {
        delegate!(self, inner => inner.pool_leave(env, pool))
    }

    pub(super) fn pool_delete<E: Env>(&mut self, env: &mut InnerEnv<'_, E>, pool: PoolId) {
        delegate!(self, inner => inner.pool_delete(env, pool))
    }

    pub(super) fn stream_added(&mut self, stream: StreamId, handle: u64) {
        delegate!(self, inner => inner.stream_added(stream, handle))
    }

    pub(super) fn levels(&self) -> Levels {
        delegate!(self, inner => inner.levels())
    }

    pub(super) fn largest_hole(&self, request: Request) -> u64 {
        delegate!(self, inner => inner.largest_hole(request))
    }

    pub(super) fn check_invariants(&self) -> Result<(), String> {
        delegate!(self, inner => inner.check_invariants())
    }

    pub(super) fn failure(&self) -> Option<String> {
        delegate!(self, inner => inner.failure())
    }

    pub(super) fn counters(&self) -> Vec<(&'static str, u64)> {
        delegate!(self, inner => inner.counters())
    }

    pub(super) fn params(&self) -> Vec<(String, String)> {
        delegate!(self, inner => inner.params())
    }

    pub(super) fn layout(&self, visit: &mut dyn FnMut(LayoutBlock)) {
        delegate!(self, inner => inner.layout(visit))
    }
}

/// Whose handles are whose. The owner numbers its own blocks and those of the inner allocator in
/// one sequence, which is what the engine sees.
pub(super) trait Handles {
    /// The inner allocator's handle behind one that the engine knows, if it is the inner one's.
    fn inner(&self, handle: Handle) -> Option<Handle>;
}

/// The world as the inner allocator sees it: no handle of the owner's, and segments numbered after
/// the owner's. What it refuses is not logged: the owner may know another way, else it logs.
pub(super) struct InnerEnv<'a, E: Env> {
    env: &'a mut E,
    handles: &'a dyn Handles,
    /// Blocks of the inner allocator whose use ended while the owner looked.
    ended: &'a mut VecDeque<Handle>,
    /// Blocks of the owner that completed in a wait of the inner allocator, as the engine knows
    /// them. The owner completes them when the call is over.
    pub(super) completed: Vec<Handle>,
    /// Blocks of the inner allocator that it took back in a wait, as the engine knows them: it will
    /// not name them again.
    pub(super) returned: Vec<Handle>,
    /// Whether the inner allocator waited for the device.
    pub(super) waited: bool,
    /// Segments that are the owner's.
    segments: u32,
}

impl<'a, E: Env> InnerEnv<'a, E> {
    /// Wraps the owner's world for one call.
    pub(super) fn new(
        env: &'a mut E,
        handles: &'a dyn Handles,
        ended: &'a mut VecDeque<Handle>,
        segments: u32,
    ) -> InnerEnv<'a, E> {
        InnerEnv {
            env,
            handles,
            ended,
            completed: Vec::new(),
            returned: Vec::new(),
            waited: false,
            segments,
        }
    }
}

impl<E: Env> Env for InnerEnv<'_, E> {
    type Device = E::Device;
    const LOG: bool = E::LOG;

    fn device(&mut self) -> &mut E::Device {
        self.env.device()
    }

    fn next_completed(&mut self) -> Option<Handle> {
        // The owner has looked at all that had ended before it called.
        self.ended.pop_front()
    }

    fn wait_completed(&mut self) -> Option<Handle> {
        self.waited = true;
        if let Some(handle) = self.ended.pop_front() {
            return Some(handle);
        }
        while let Some(handle) = self.env.wait_completed() {
            match self.handles.inner(handle) {
                Some(inner) => {
                    self.returned.push(handle);
                    return Some(inner);
                }
                None => self.completed.push(handle),
            }
        }
        None
    }

    fn wait_completed_of(&mut self, wanted: &mut dyn FnMut(Handle) -> bool) -> Option<Handle> {
        if let Some(at) = self.ended.iter().position(|&handle| wanted(handle)) {
            return self.ended.remove(at);
        }
        let handles = self.handles;
        let mut wanted_inner = |handle| handles.inner(handle).is_some_and(&mut *wanted);
        let handle = self.env.wait_completed_of(&mut wanted_inner)?;
        self.returned.push(handle);
        handles.inner(handle)
    }

    fn log(&mut self, action: Action) {
        // Whether a request is refused for good is the owner's to say.
        if action.kind == ActionKind::Oom {
            return;
        }
        let segment = match action.segment {
            u32::MAX => u32::MAX,
            segment => segment.saturating_add(self.segments),
        };
        self.env.log(Action { segment, ..action });
    }
}
