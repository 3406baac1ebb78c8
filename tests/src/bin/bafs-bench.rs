//! `bafs-bench NAME [--json] [--quick] [--only PART,…]`: runs one
//! benchmark; `--list` names all. `cargo xtask bench` builds and starts it. Measures nothing
//! itself.
#![allow(clippy::print_stdout, reason = "a benchmark prints what it measured")]

use std::process::ExitCode;

use bafs_tests::bench;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match bench::main(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
