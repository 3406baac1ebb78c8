//! Cache volumes and the cooperative cache over real directories and an in-memory network.

mod changing;
mod damage;
mod faults;
mod hurt;
mod keeping;
mod large;
mod near;
mod sharing;
mod warming;
mod world;
