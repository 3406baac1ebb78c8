//! What requests bring: parameters and bodies, with errors in the form of all others.

use axum::body::Bytes;
use axum::extract::rejection::{BytesRejection, QueryRejection};
use axum::extract::{FromRequest, FromRequestParts, Query, Request};
use axum::http::header::CONTENT_TYPE;
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode};
use bafs_proto::ErrorCode;
use bafs_queue::Requester;
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer};

use crate::api_error::{ApiError, ApiResult};
use crate::views::JobStateView;

/// Rows of a list that are given at once, and when nobody says how many.
pub(crate) const ROWS_MAX: u32 = 1_000;
const ROWS_DEFAULT: u32 = 100;

/// Longest text that names are searched for, in characters.
const SEARCH_CHARS_MAX: usize = 200;

/// Who sends the request, after authentication.
pub(crate) struct Caller(pub(crate) Requester);

impl<S: Sync> FromRequestParts<S> for Caller {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> ApiResult<Self> {
        let requester = parts.extensions.get::<Requester>().cloned();
        let missing = || ApiError::malformed("the request was not authenticated");
        requester.map(Self).ok_or_else(missing)
    }
}

/// Parameters after the question mark.
pub(crate) struct Parameters<T>(pub(crate) T);

impl<T: DeserializeOwned, S: Sync> FromRequestParts<S> for Parameters<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> ApiResult<Self> {
        let read: Result<Query<T>, QueryRejection> = Query::try_from_uri(&parts.uri);
        match read {
            Ok(Query(value)) => Ok(Self(value)),
            Err(error) => Err(ApiError::malformed(format!(
                "a parameter is wrong: {error}"
            ))),
        }
    }
}

/// A body of JSON.
pub(crate) struct JsonBody<T>(pub(crate) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for JsonBody<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> ApiResult<Self> {
        check_content_type(request.headers())?;
        let bytes = read_body(Bytes::from_request(request, state).await)?;
        match serde_json::from_slice(&bytes) {
            Ok(value) => Ok(Self(value)),
            Err(error) => Err(ApiError::malformed(format!("the body is wrong: {error}"))),
        }
    }
}

fn check_content_type(headers: &HeaderMap) -> ApiResult<()> {
    let value = headers
        .get(CONTENT_TYPE)
        .and_then(|value| value.to_str().ok());
    let kind = value.and_then(|value| value.split(';').next());
    match kind.is_some_and(|kind| kind.trim().eq_ignore_ascii_case("application/json")) {
        true => Ok(()),
        false => Err(ApiError::new(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            ErrorCode::Malformed,
            "the body is not JSON",
            "Send JSON, with the header Content-Type: application/json.",
        )),
    }
}

fn read_body(read: Result<Bytes, BytesRejection>) -> ApiResult<Bytes> {
    read.map_err(|error| match error.status() {
        StatusCode::PAYLOAD_TOO_LARGE => {
            bafs_proto::Error::new(ErrorCode::TooLarge, "the body is too large").into()
        }
        _ => ApiError::malformed(format!("the body cannot be read: {error}")),
    })
}

/// Which rows of a list.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Window {
    #[serde(default)]
    pub(crate) offset: u32,
    #[serde(default = "default_rows")]
    pub(crate) limit: u32,
}

/// Which jobs.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct JobQuery {
    #[serde(default)]
    pub(crate) offset: u32,
    #[serde(default = "default_rows")]
    pub(crate) limit: u32,
    pub(crate) state: Option<JobStateView>,
    /// A part of the name.
    pub(crate) search: Option<String>,
}

/// Which attempt's output.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LogQuery {
    pub(crate) attempt: Option<u32>,
}

/// How many steps of a series.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SeriesQuery {
    #[serde(default = "default_points")]
    pub(crate) points: u32,
}

/// Parameters of routes that have none.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NoParameters {}

fn default_rows() -> u32 {
    ROWS_DEFAULT
}

fn default_points() -> u32 {
    240
}

/// Reads a whole number in any form that JSON has for it, such as `3.0`.
pub(crate) fn read_integer<'de, D: Deserializer<'de>>(from: D) -> Result<i32, D::Error> {
    let number = serde_json::Number::deserialize(from)?;
    let whole = number.as_f64().filter(|value| value.fract() == 0.0);
    let in_range =
        whole.filter(|value| (f64::from(i32::MIN)..=f64::from(i32::MAX)).contains(value));
    let wrong = || D::Error::custom(format!("{number} is no whole number of 32 bits"));
    in_range.map(|value| value as i32).ok_or_else(wrong)
}

/// Rejects a number of rows that is not given at once.
pub(crate) fn check_limit(limit: u32, max: u32) -> ApiResult<()> {
    match (1..=max).contains(&limit) {
        true => Ok(()),
        false => Err(ApiError::malformed(format!("limit must be 1 to {max}"))),
    }
}

impl JobQuery {
    pub(crate) fn check(&self) -> ApiResult<()> {
        check_limit(self.limit, ROWS_MAX)?;
        let search = self.search.as_deref().unwrap_or_default();
        match search.chars().count() > SEARCH_CHARS_MAX {
            true => Err(ApiError::malformed(format!(
                "search must have at most {SEARCH_CHARS_MAX} characters"
            ))),
            false => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_numbers_are_read_in_any_form() {
        let read = |text: &str| read_integer(&mut serde_json::Deserializer::from_str(text)).ok();
        assert_eq!(read("-964.0"), Some(-964));
        assert_eq!(read("2147483647"), Some(i32::MAX));
        for wrong in ["1.5", "2147483648", "\"1\"", "null"] {
            assert_eq!(read(wrong), None, "{wrong}");
        }
    }
}
