//! Views: second ranges of addresses over pieces, each for one live block at a time.
//!
//! ```text
//!   view     │ skip │ block                                    │ rest │
//!   pieces   │ 7            │ 3            │ 4            │ 12          │   each mapped whole
//!   home     │ used │ free  │   free, somewhere else      │ free │ used │
//! ```
//!
//! The first piece may give its back only and the last its front only: what is used of a piece is
//! a matter of the books at home, what is mapped is always all of it.

use std::hash::{BuildHasher, Hash, Hasher};

use super::heap::{Heap, UNIT_BYTES};

/// A view.
#[derive(Clone, Debug)]
pub(super) struct View {
    pub(super) address: u64,
    pub(super) size_bytes: u64,
    /// Empty once the view is gone.
    pub(super) pieces: Vec<u32>,
    /// Bytes of the first piece before the block.
    pub(super) skip_bytes: u64,
    /// The largest block that it serves: what it was made for, up to a whole unit. The pieces may
    /// have room for more.
    pub(super) room_bytes: u64,
    /// A live block lies in it.
    pub(super) is_live: bool,
    /// When it was last handed out, as the allocator counts.
    pub(super) last_used: u64,
    /// Age: views are numbered as they are made.
    pub(super) number: u64,
    pub(super) arena: u32,
    /// Place in the order of segments and views.
    pub(super) ordinal: u32,
}

impl View {
    /// Names the view by what it maps, so that it is known again when it was evicted.
    pub(super) fn signature(&self) -> u64 {
        let mut hasher = foldhash::fast::FixedState::default().build_hasher();
        self.pieces.hash(&mut hasher);
        self.skip_bytes.hash(&mut hasher);
        hasher.finish()
    }
}

/// The class of a room: its power of two in units.
fn class(room_bytes: u64) -> usize {
    (room_bytes / UNIT_BYTES).max(1).ilog2() as usize
}

impl Heap {
    /// Enters a view that is not live.
    pub(super) fn add_view(&mut self, view: View) -> u32 {
        let View { arena, last_used, .. } = view;
        let class = class(view.room_bytes);
        let id = match self.spare_views.pop() {
            Some(id) => {
                self.views[id as usize] = view;
                id
            }
            None => {
                self.views.push(view);
                (self.views.len() - 1) as u32
            }
        };
        for &piece in &self.views[id as usize].pieces {
            self.pieces[piece as usize].views.push(id);
        }
        let views = &mut self.arenas[arena as usize].views;
        if views.len() <= class {
            views.resize(class + 1, Vec::new());
        }
        views[class].push(id);
        self.idle_views.insert((last_used, id));
        id
    }

    /// Takes a view out that is not live.
    pub(super) fn drop_view(&mut self, id: u32) {
        let view = &mut self.views[id as usize];
        let (arena, class) = (view.arena, class(view.room_bytes));
        self.idle_views.remove(&(view.last_used, id));
        for piece in std::mem::take(&mut view.pieces) {
            self.pieces[piece as usize].views.retain(|&other| other != id);
        }
        self.arenas[arena as usize].views[class].retain(|&other| other != id);
        self.spare_views.push(id);
    }

    /// A view is handed out.
    pub(super) fn begin_use(&mut self, id: u32, now: u64) {
        let view = &mut self.views[id as usize];
        self.idle_views.remove(&(view.last_used, id));
        view.is_live = true;
        view.last_used = now;
    }

    /// The live block in a view was freed.
    pub(super) fn end_use(&mut self, id: u32) {
        let view = &mut self.views[id as usize];
        view.is_live = false;
        self.idle_views.insert((view.last_used, id));
    }

    /// The oldest view with room for `size_bytes`, and for less than twice as many, of which all
    /// that such a block needs is free. The oldest: see the module docs of `best` on periodic
    /// programs.
    pub(super) fn oldest_view(&self, arena: u32, size_bytes: u64) -> Option<u32> {
        let views = &self.arenas[arena as usize].views;
        let class = class(size_bytes);
        let mut oldest: Option<(u64, u32)> = None;
        for class in views.iter().skip(class).take(2) {
            for &id in class {
                let view = &self.views[id as usize];
                if oldest.is_some_and(|(number, _)| number < view.number) {
                    break;
                }
                let fits = size_bytes <= view.room_bytes && view.room_bytes / 2 < size_bytes;
                if fits && !view.is_live && self.is_free(view, size_bytes) {
                    oldest = Some((view.number, id));
                    break;
                }
            }
        }
        oldest.map(|(_, id)| id)
    }

    /// Whether all that a block of `size_bytes` in this view needs is free.
    pub(super) fn is_free(&self, view: &View, size_bytes: u64) -> bool {
        self.parts(view, size_bytes)
            .all(|(piece, offset, bytes)| self.free_block_at(piece, offset, bytes).is_some())
    }

    /// What a block of `size_bytes` in this view has of each piece: piece, offset and bytes.
    pub(super) fn parts<'a>(
        &'a self,
        view: &'a View,
        size_bytes: u64,
    ) -> impl Iterator<Item = (u32, u64, u64)> + 'a {
        let mut left = size_bytes;
        let mut offset = view.skip_bytes;
        view.pieces.iter().map_while(move |&piece| {
            let bytes = (self.pieces[piece as usize].size_bytes - offset).min(left);
            left -= bytes;
            (bytes > 0).then_some((piece, std::mem::take(&mut offset), bytes))
        })
    }
}
