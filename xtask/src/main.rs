//! The developer commands of BAFS: `cargo xtask COMMAND`. Parses arguments; does no work itself.
#![allow(
    clippy::print_stdout,
    reason = "a developer command talks to the person who started it"
)]

mod bench;
mod ci;
mod demo;
mod dist;
mod house;
mod measurements;
mod programs;
mod setup;
mod shell;
mod skips;
mod soak;
mod suites;
mod test;
mod tidy;
mod totals;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Developer commands of BAFS.
#[derive(Parser)]
#[command(bin_name = "cargo xtask", disable_help_subcommand = true)]
struct Arguments {
    #[command(subcommand)]
    command: XtaskCommand,
}

#[derive(Subcommand)]
enum XtaskCommand {
    /// Install what is missing, build, and run the main job on this machine.
    Demo {
        /// Handed to `bafs demo` as they are.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Install what is missing, build, and run all tests.
    Test {
        /// Handed to the test runner as they are: filters, `--no-capture`, …
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Make what users install: static program, wheel, Debian package.
    Dist(dist::DistArguments),
    /// Run everything that must pass before a change lands.
    Ci,
    /// Check the rules that the compiler does not know.
    Tidy,
    /// Measure how long the sentences of the documents are.
    Prose {
        /// `--json` prints a JSON object on the last line.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Measure how the code is built: import circles, sizes, policies.
    House {
        /// `--json` prints a JSON object on the last line.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Write the generated pages of docs/reference.
    Reference,
    /// Write the page of measurements from the recorded figures.
    Measurements,
    /// Install the system packages, or say how.
    Setup {
        /// What they are needed for.
        #[arg(value_enum, default_value = "test")]
        purpose: setup::Purpose,
    },
    /// Run a benchmark; without a name, list them.
    Bench {
        /// The benchmark.
        name: Option<String>,
        /// Handed to the benchmark as they are; `--json` is understood by all.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Run the long tests, which `cargo xtask test` leaves out.
    Soak {
        /// Handed to the test runner as they are.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
}

fn main() -> ExitCode {
    let result = match Arguments::parse().command {
        XtaskCommand::Demo { arguments } => demo::replace_this_process(&arguments),
        XtaskCommand::Test { arguments } => test::run_and_print(&arguments),
        XtaskCommand::Dist(arguments) => dist::run_dist(&arguments),
        XtaskCommand::Ci => ci::run_ci(),
        XtaskCommand::Tidy => tidy::run_tidy(),
        XtaskCommand::Prose { arguments } => tidy::run_prose(&arguments),
        XtaskCommand::House { arguments } => house::run_and_print(&arguments),
        XtaskCommand::Reference => tidy::reference(tidy::Reference::Written),
        XtaskCommand::Measurements => measurements::write_page(),
        XtaskCommand::Setup { purpose } => setup::ensure_packages(purpose),
        XtaskCommand::Bench { name, arguments } => {
            bench::run_benchmark(name.as_deref(), &arguments)
        }
        XtaskCommand::Soak { arguments } => soak::run_long_tests(&arguments),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
