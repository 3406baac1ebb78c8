//! The HTTP API of BAFS and the page that uses it, over runs and a queue that somebody else has.
//!
//! ```text
//!  browser ─▶ access ─▶ routes ─▶ RunSource     (runs of `bafs run --page`, `bafs page`)
//!  Python                      └▶ QueueControl  (workflows that wait: the service)
//! ```
//!
//! * [`RunSource`] is what a program implements: it gives a [`RunView`] of a run as it is now, and
//!   takes commands. All else that is served is derived from views, by pure functions.
//! * [`start_server`] serves them at an address of the machine itself, in a thread of its own.
//! * [`Access`] decides who may: a bearer token, or a cookie that a one-time link gave. Requests
//!   that another page forged, or that came by another host name, are rejected.
//! * `openapi.json` describes all routes. A test compares it with what is served.
//!
//! **Errors** are JSON with the code and the class of `bafs_proto`, and with advice.

mod access;
mod api_error;
mod app;
mod derived;
mod event_stream;
#[cfg(test)]
mod example_source;
mod open_streams;
mod page;
mod parameters;
mod routes;
mod run_routes;
mod server;
mod source;
mod views;
mod workflow_routes;

pub use access::{Access, LoginLink};
pub use server::{PageServer, start_server};
pub use source::{RunCommand, RunSource};
pub use views::{
    DeliveryView, ExecutionOutcomeView, ExecutionView, FailureView, HistoryLineView, HistoryPage,
    JobDetails, JobStateView, JobView, LogView, MetricsView, NodeView, ProgressView, RunStateView,
    RunSummary, RunView, TimeView, TrafficSample, VolumeRoleView, VolumeView,
};
