//! The tests of this crate from outside as one program, for each program is linked with all again.

mod edge_cases;
mod model;
mod operations;
mod reads_without_handle;
mod space;
mod test_tree;
