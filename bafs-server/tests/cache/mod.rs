//! Cache volumes and the cooperative cache over real directories and an in-memory network.

mod membership;
mod damage;
mod faults;
mod whole_file_damage;
mod retention;
mod large_files;
mod local;
mod sharing;
mod warming;
mod test_cluster;
