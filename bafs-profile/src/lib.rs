//! What traces of file use say of a workload: the measurements of Bent 2005, chapter 2.
//!
//! ```text
//!  operations ─▶ TraceBuilder ─▶ Trace of a command ─▶ Report: tables, JSON
//!                                 (one stage of one          └▶ skeleton workflow
//!                                  instance)
//! ```
//!
//! * [`trace`] is what is kept of a command, and [`trace_builder`] makes it.
//! * [`role`] finds endpoint, pipeline and batch data from several instances.
//! * [`report`] has all figures: [`traffic`] (Tables 2.1-2.4), [`cache_curve`] (Figs 2.3, 2.4),
//!   [`timeline`] (Fig 2.6), [`home_scaling`] (2.7), [`variability`] and [`canonical`] (§6.3.1).
//! * [`skeleton`] writes a workflow.
//!
//! Pure: no clock, no file, no process. It depends on no other crate of BAFS, so that agents and
//! tests may use it at no cost.

mod byte_ranges;
pub mod cache_curve;
pub mod canonical;
pub mod home_scaling;
pub mod instances;
pub mod report;
pub mod role;
pub mod skeleton;
pub mod tables;
pub mod timeline;
pub mod trace;
pub mod trace_builder;
pub mod traffic;
pub mod variability;
