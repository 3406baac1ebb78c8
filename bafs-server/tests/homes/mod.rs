//! Homes of other kinds, each a real server on loopback: nodes fill volumes from them, cache them,
//! send results to them, and notice what changed.

mod bucket;
mod file;
mod foreign_servers;
mod ftp;
mod proxy;
mod sftp;
mod test_node;
mod web;
