//! The server over real connections: who may ask, what is answered, and its description.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use serde_json::{Value, json};

use super::*;
use crate::example_source::ExampleSource;
use crate::routes::OPENAPI;
use crate::source::RunCommand;
use bafs_queue::Requester;

struct Reply {
    status: u16,
    head: String,
    body: String,
}

impl Reply {
    fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.body))
    }

    fn header(&self, name: &str) -> Option<&str> {
        let mut lines = self.head.lines().filter_map(|line| line.split_once(": "));
        lines
            .find(|(found, _)| found.eq_ignore_ascii_case(name))
            .map(|(_, value)| value)
    }
}

fn send_request(address: SocketAddr, request: &str) -> Reply {
    let mut stream = TcpStream::connect(address).expect("it listens");
    let within = Some(Duration::from_secs(20));
    stream.set_read_timeout(within).expect("a time limit");
    stream.write_all(request.as_bytes()).expect("it is sent");
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    let answer = String::from_utf8_lossy(&answer);
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
    let status = head
        .split(' ')
        .nth(1)
        .and_then(|status| status.parse().ok());
    Reply {
        status: status.expect("a status"),
        head: head.to_owned(),
        body: body.to_owned(),
    }
}

struct Served {
    server: PageServer,
    source: Arc<ExampleSource>,
    token: String,
}

fn serve() -> Served {
    let source = Arc::new(ExampleSource::default());
    let server = start_server("127.0.0.1:0", source.clone(), None).expect("it starts");
    let token = server.access().create_token(requester("ann"));
    Served {
        server,
        source,
        token,
    }
}

fn requester(user: &str) -> Requester {
    Requester {
        user: user.to_owned(),
        is_operator: false,
        sees_others: false,
    }
}

impl Served {
    fn send(&self, method: &str, path: &str, headers: &str, body: &str) -> Reply {
        let (length, address) = (body.len(), self.server.address());
        let request = format!(
            "{method} {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\
             Content-Length: {length}\r\n{headers}\r\n{body}"
        );
        send_request(address, &request)
    }

    fn get(&self, path: &str) -> Reply {
        let bearer = format!("Authorization: Bearer {}\r\n", self.token);
        self.send("GET", path, &bearer, "")
    }

    fn post(&self, path: &str, body: &str) -> Reply {
        let headers = format!(
            "Authorization: Bearer {}\r\nContent-Type: application/json\r\n",
            self.token
        );
        self.send("POST", path, &headers, body)
    }
}

/// A path of the description with what its parameters mean in the example.
fn fill_path(path: &str) -> String {
    path.replace("{run}", "7")
        .replace("{job}", "job.3")
        .replace("{id}", "1")
}

fn described_operations() -> Vec<(String, String, Value)> {
    let description: Value = serde_json::from_str(OPENAPI).expect("it is JSON");
    let paths = description["paths"].as_object().expect("paths").clone();
    let of_path = |(path, operations): (String, Value)| {
        let operations = operations.as_object().expect("operations").clone();
        let of_method = move |(method, operation)| (path.clone(), method, operation);
        operations.into_iter().map(of_method)
    };
    paths.into_iter().flat_map(of_path).collect()
}

#[test]
fn unauthenticated_requests_get_nothing() {
    let served = serve();
    for (path, method, _) in described_operations() {
        let reply = served.send(&method.to_uppercase(), &fill_path(&path), "", "");
        assert_eq!(reply.status, 401, "{method} {path}");
        assert_eq!(reply.json()["error"]["class"], "Denied");
    }
    for path in ["/", "/login?code=x"] {
        let reply = served.send("GET", path, "", "");
        assert_eq!(reply.status, 401, "{path}");
        assert!(reply.header("set-cookie").is_none());
    }
    // Another user has no run here.
    let token = served.server.access().create_token(requester("bob"));
    let bob = format!("Authorization: Bearer {token}\r\n");
    let runs = served.send("GET", "/api/v1/runs", &bob, "").json();
    assert_eq!(runs, json!({ "runs": [] }));
    assert_eq!(served.send("GET", "/api/v1/runs/7", &bob, "").status, 404);
}

#[test]
fn login_link_opens_the_page_once() {
    let served = serve();
    let link = served
        .server
        .access()
        .create_login_link(requester("ann"))
        .to_string();
    let path = link.strip_prefix(&format!("http://{}", served.server.address()));
    let path = path.expect("a link to here");
    let reply = served.send("GET", path, "", "");
    assert_eq!(reply.status, 200);
    let cookie = reply.header("set-cookie").expect("a cookie");
    let cookie = cookie.split(';').next().expect("a pair");
    assert_eq!(
        served.send("GET", path, "", "").status,
        401,
        "a second time"
    );
    let cookie = format!("Cookie: {cookie}\r\n");
    let page = served.send("GET", "/", &cookie, "");
    assert_eq!(page.status, 200);
    let policy = page.header("content-security-policy").expect("a policy");
    assert!(policy.contains("default-src 'none'") && !policy.contains("unsafe"));
    assert_eq!(served.send("GET", "/api/v1/runs", &cookie, "").status, 403);
    let token = reply
        .body
        .split("#token=")
        .nth(1)
        .and_then(|rest| rest.get(..64));
    let both = format!("{cookie}x-bafs-token: {}\r\n", token.expect("a token"));
    assert_eq!(served.send("GET", "/api/v1/runs", &both, "").status, 200);
    assert_eq!(
        served.send("POST", "/api/v1/runs/7/hold", &both, "").status,
        403
    );
    let own = format!("{both}Origin: http://{}\r\n", served.server.address());
    assert_eq!(
        served.send("POST", "/api/v1/runs/7/hold", &own, "").status,
        202
    );
}

#[test]
fn foreign_host_name_is_rejected() {
    let served = serve();
    let bearer = &served.token;
    let request = format!(
        "GET /api/v1/runs HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\
         Authorization: Bearer {bearer}\r\n\r\n"
    );
    let reply = send_request(served.server.address(), &request);
    assert_eq!(
        (reply.status, &reply.json()["error"]["class"]),
        (421, &json!("Denied"))
    );
}

#[test]
fn description_lists_every_route() {
    let sources = [
        include_str!("../routes.rs"),
        include_str!("../run_routes.rs"),
        include_str!("../workflow_routes.rs"),
    ];
    let routes = sources
        .iter()
        .flat_map(|text| text.split(".route(\"").skip(1));
    let mut served: Vec<String> = routes
        .map(|rest| format!("/api/v1{}", rest.split('"').next().expect("a path")))
        .collect();
    served.sort();
    let mut described: Vec<String> = described_operations().into_iter().map(|it| it.0).collect();
    described.dedup();
    described.sort();
    assert_eq!(served, described);
}

#[test]
fn answers_are_as_described() {
    let served = serve();
    let description: Value = serde_json::from_str(OPENAPI).expect("it is JSON");
    for (path, method, operation) in described_operations() {
        if method != "get" || path.ends_with("/events") {
            continue;
        }
        let reply = served.get(&fill_path(&path));
        let mut described = &operation["responses"][reply.status.to_string()];
        if let Some(name) = described["$ref"].as_str() {
            let name = name.rsplit('/').next().expect("a name");
            described = &description["components"]["responses"][name];
        }
        let schema = &described["content"]["application/json"]["schema"];
        assert!(
            schema.is_object(),
            "{path}: status {}: {}",
            reply.status,
            reply.body
        );
        if let Err(why) = check_value(&description, schema, &reply.json(), "") {
            panic!("{path}: {why}: {}", reply.body);
        }
    }
}

/// Checks a value against the parts of JSON Schema that the description uses.
fn check_value(root: &Value, schema: &Value, value: &Value, at: &str) -> Result<(), String> {
    if let Some(name) = schema["$ref"].as_str() {
        let name = name.rsplit('/').next().expect("a name");
        return check_value(root, &root["components"]["schemas"][name], value, at);
    }
    if let Some(options) = schema["anyOf"].as_array() {
        let fits = |option| check_value(root, option, value, at).is_ok();
        return options
            .iter()
            .any(fits)
            .then_some(())
            .ok_or_else(|| format!("{at}: fits nothing"));
    }
    let kind = match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "integer",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    };
    let allowed = &schema["type"];
    let is_allowed = allowed == kind
        || allowed
            .as_array()
            .is_some_and(|it| it.contains(&json!(kind)));
    if !is_allowed {
        return Err(format!("{at}: {kind} and not {allowed}"));
    }
    if schema["enum"]
        .as_array()
        .is_some_and(|values| !values.contains(value))
    {
        return Err(format!("{at}: {value} is not listed"));
    }
    for (position, item) in value.as_array().into_iter().flatten().enumerate() {
        check_value(root, &schema["items"], item, &format!("{at}/{position}"))?;
    }
    let fields = value.as_object().into_iter().flatten();
    for (name, field) in fields {
        let schema = match &schema["properties"][name] {
            Value::Null => &schema["additionalProperties"],
            found => found,
        };
        if schema == &json!(false) {
            return Err(format!("{at}/{name}: is not described"));
        }
        if schema.is_object() {
            check_value(root, schema, field, &format!("{at}/{name}"))?;
        }
    }
    for name in schema["required"].as_array().into_iter().flatten() {
        if value.get(name.as_str().expect("a name")).is_none() {
            return Err(format!("{at}: {name} is missing"));
        }
    }
    Ok(())
}

#[test]
fn commands_reach_the_source() {
    let served = serve();
    let paths = [
        ("/api/v1/runs/7/cancel", ""),
        ("/api/v1/runs/7/jobs/job.3/hold", ""),
        ("/api/v1/runs/7/jobs/job.3/priority", "{\"priority\": -4}"),
    ];
    for (path, body) in paths {
        let reply = served.post(path, body);
        assert_eq!(reply.status, 202, "{}", reply.body);
    }
    let expected = [
        RunCommand::CancelRun,
        RunCommand::HoldPipeline(3),
        RunCommand::SetPriority(3, -4),
    ];
    assert_eq!(*served.source.commands.lock().expect("no panic"), expected);
}

#[test]
fn wrong_requests_get_errors_with_advice() {
    let served = serve();
    let prefix = "/api/v1/runs/7";
    let replies = [
        (served.get("/nowhere"), 404),
        (served.get("/api/v1/nowhere"), 404),
        (served.get("/api/v1/runs/8"), 404),
        (served.get(&format!("{prefix}/jobs/none")), 404),
        (served.get(&format!("{prefix}/jobs?limit=0")), 400),
        (served.get(&format!("{prefix}/jobs?limit=x")), 400),
        (served.get(&format!("{prefix}/jobs?state=lost")), 400),
        (served.get(&format!("{prefix}/jobs?unknown=1")), 400),
        (
            served.get(&format!("{prefix}/jobs/job.1/logs?attempt=0")),
            400,
        ),
        (served.get(&format!("{prefix}/series?points=1")), 400),
        (served.post("/api/v1/runs", ""), 405),
        (
            served.post(&format!("{prefix}/jobs/job.1/priority"), "{"),
            400,
        ),
        (
            served.post("/api/v1/workflows", "{\"name\":\"a\",\"text\":\"\"}"),
            404,
        ),
        (served.get("/api/v1/workflows"), 404),
    ];
    for (reply, status) in replies {
        assert_eq!(reply.status, status, "{}", reply.body);
        let error = reply.json()["error"].clone();
        assert_eq!(error["status"], json!(status));
        assert!(
            error["advice"]
                .as_str()
                .is_some_and(|advice| advice.ends_with('.'))
        );
    }
    let not_json = format!("Authorization: Bearer {}\r\n", served.token);
    let path = format!("{prefix}/jobs/job.1/priority");
    assert_eq!(served.send("POST", &path, &not_json, "{}").status, 415);
}

#[test]
fn event_stream_sends_run_and_lines() {
    let served = serve();
    let mut stream = TcpStream::connect(served.server.address()).expect("it listens");
    stream
        .set_read_timeout(Some(Duration::from_secs(20)))
        .expect("a time limit");
    let (address, token) = (served.server.address(), &served.token);
    let request = format!(
        "GET /api/v1/runs/7/events?from=1 HTTP/1.1\r\nHost: {address}\r\n\
         Authorization: Bearer {token}\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).expect("it is sent");
    let mut told = String::new();
    let mut part = [0; 4_096];
    while !told.contains("\"number\":2") {
        let length = stream.read(&mut part).expect("more comes");
        assert!(length > 0, "{told}");
        told += &String::from_utf8_lossy(&part[..length]);
    }
    assert!(
        told.contains("event: run") && told.contains("event: line"),
        "{told}"
    );
    assert!(
        told.contains("id: 1") && !told.contains("\"number\":0"),
        "{told}"
    );
}

#[test]
fn public_address_is_rejected() {
    let source: Arc<dyn RunSource> = Arc::new(ExampleSource::default());
    let error = start_server("0.0.0.0:0", source, None).expect_err("it is public");
    assert!(error.detail.contains("ssh -L"), "{}", error.detail);
}
