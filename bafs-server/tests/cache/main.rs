//! Cache volumes and the cooperative cache over real directories and an in-memory network.

mod faults;
mod keeping;
mod near;
mod sharing;
mod world;
