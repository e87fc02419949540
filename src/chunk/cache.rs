//! Released payloads that wait for the next of their kind (spec patrickstar 4.5).
//!
//! ```text
//!   release ── push, filled with zeros ──> ≤ 2 of a device and size ── pop ──> allocate
//!                 └─ full: really freed
//! ```
//!
//! Payloads that wait count as used in the budgets.

use super::states::{Device, Payload};

/// Payloads of a device and size that may wait.
const CAPACITY: usize = 2;

/// Payloads that wait, with their size in bytes.
#[derive(Clone, Debug, Default)]
pub(super) struct Cache {
    idle: Vec<(u64, Payload)>,
}

impl Cache {
    /// The payload of that device and size that has waited longest.
    pub(super) fn pop(&mut self, device: Device, bytes: u64) -> Option<Payload> {
        let fits = |(size, payload): &(u64, Payload)| *size == bytes && payload.device == device;
        let at = self.idle.iter().position(fits)?;
        Some(self.idle.remove(at).1)
    }

    /// Keeps a payload, or says no.
    pub(super) fn push(&mut self, payload: Payload, bytes: u64) -> bool {
        let alike =
            |(size, other): &&(u64, Payload)| *size == bytes && other.device == payload.device;
        let has_room = self.idle.iter().filter(alike).count() < CAPACITY;
        if has_room {
            self.idle.push((bytes, payload));
        }
        has_room
    }

    /// Gives up every payload of the device.
    pub(super) fn drain(&mut self, device: Device) -> Vec<(u64, Payload)> {
        let (gone, kept) = self.idle.drain(..).partition(|(_, payload)| payload.device == device);
        self.idle = kept;
        gone
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_of_a_kind_wait_and_no_more() {
        let mut cache = Cache::default();
        let host = Payload { device: Device::Host, held: None };
        let gpu = Payload { device: Device::Gpu, held: None };
        assert!(cache.push(host, 200) && cache.push(host, 200) && !cache.push(host, 200));
        assert!(cache.push(host, 400), "another size");
        assert!(cache.push(gpu, 200), "another device");
        assert!(cache.pop(Device::Gpu, 400).is_none());
        assert!(cache.pop(Device::Gpu, 200).is_some());
        assert!(cache.pop(Device::Gpu, 200).is_none());
        assert_eq!(cache.drain(Device::Host).len(), 3);
        assert!(cache.push(host, 200));
    }
}
