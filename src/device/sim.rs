//! sim
/// A simulated device.
#[derive(Clone, Debug)]
pub struct Sim;
