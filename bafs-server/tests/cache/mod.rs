//! Cache volumes and the cooperative cache over real directories and an in-memory network.

mod damage;
mod faults;
mod large_files;
mod local;
mod membership;
mod poisoning;
mod retained_data;
mod retention;
mod sharing;
mod test_cluster;
mod warming;
mod whole_file_damage;
