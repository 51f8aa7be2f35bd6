//! An agent that lies: a real agent behind a proxy that changes one field of an answer.
//!
//! The proxy changes answers as protobuf on the wire, so that it covers every field of every
//! answer, including fields that are added later.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use prost::bytes::{Buf, BufMut};
use slackwater::router::agents::endpoint;
use tokio_stream::{Stream, StreamExt};
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::transport::Channel;
use tonic::{Request, Response, Status, Streaming};

use crate::router::cluster::Served;

/// A change to an answer.
#[derive(Clone, Debug)]
pub struct Lie {
    /// The last part of the method's path.
    pub method: String,
    /// The field of its answer, in wire order.
    pub field: usize,
    pub what: LieKind,
}

#[derive(Clone, Debug)]
pub enum LieKind {
    /// The field is missing.
    Dropped,
    /// The field occurs twice.
    Twice,
    /// The field has another text or number.
    Text(String),
    Number(u64),
    /// Another message replaces the whole answer.
    Forged(Vec<u8>),
}

/// The type of a field of an answer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    Text,
    Number,
    Other,
}

#[derive(Default)]
struct Plan {
    lie: Option<Lie>,
    /// The number of fields in the answers of a method, and how often the present lie was applied.
    fields: BTreeMap<String, Vec<Kind>>,
    reported: usize,
}

/// The proxy in front of an agent.
#[derive(Clone)]
pub struct Liar {
    plan: Arc<Mutex<Plan>>,
    channel: Channel,
}

impl Liar {
    /// Must be called within a runtime.
    pub fn before(agent: SocketAddr) -> (Liar, Served) {
        let liar = Liar {
            plan: Arc::default(),
            channel: endpoint(&agent.to_string()).unwrap().connect_lazy(),
        };
        let serving = liar.clone();
        let served = Served::at(None, move |listener| async move {
            // The channel's tasks belong to the runtime in which it is created.
            let channel = endpoint(&agent.to_string()).unwrap().connect_lazy();
            let serving = Liar { channel, ..serving };
            while let Ok((stream, _)) = listener.accept().await {
                let serving = serving.clone();
                tokio::spawn(async move {
                    let service = service_fn(move |request: hyper::Request<Incoming>| {
                        let pass = Pass {
                            liar: serving.clone(),
                            path: request.uri().path().to_string(),
                        };
                        async move {
                            let mut grpc = tonic::server::Grpc::new(Raw);
                            Ok::<_, Infallible>(grpc.streaming(pass, request).await)
                        }
                    });
                    let connection = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
                        .serve_connection(TokioIo::new(stream), service);
                    let _ = connection.await;
                });
            }
        });
        (liar, served)
    }

    /// Sets the lie, or `None` for true answers.
    pub fn set_lie(&self, lie: Option<Lie>) {
        let mut plan = self.plan.lock().unwrap();
        plan.lie = lie;
        plan.reported = 0;
    }

    /// How often the present lie was applied.
    pub fn times_applied(&self) -> usize {
        self.plan.lock().unwrap().reported
    }

    /// The methods that were called, and the number of fields in their answers.
    pub fn fields(&self) -> BTreeMap<String, Vec<Kind>> {
        self.plan.lock().unwrap().fields.clone()
    }

    fn change_answer(&self, method: &str, answer: Vec<u8>) -> Vec<u8> {
        let mut plan = self.plan.lock().unwrap();
        let parsed = parse(&answer).unwrap_or_default();
        let mut kinds = Vec::new();
        kinds_of(&parsed, &mut kinds);
        let count = kinds.len();
        let most = plan.fields.entry(method.to_string()).or_default();
        if count > most.len() {
            *most = kinds;
        }
        let Some(lie) = plan.lie.clone().filter(|lie| lie.method == method) else {
            return answer;
        };
        if let LieKind::Forged(forged) = lie.what {
            plan.reported += 1;
            return forged;
        }
        if lie.field >= count {
            return answer;
        }
        let (mut changed, mut left) = (Vec::new(), lie.field);
        change(&parsed, &mut left, &lie.what, &mut changed);
        plan.reported += usize::from(changed != answer);
        changed
    }
}

/// A field: its number and its value.
type Field = (u64, Value);

#[derive(Clone, Debug)]
enum Value {
    Number(u64),
    Fixed(Vec<u8>),
    Bytes(Vec<u8>),
    Message(Vec<Field>),
}

fn varint(bytes: &mut &[u8]) -> Option<u64> {
    prost::encoding::decode_varint(bytes).ok()
}

fn parse(mut bytes: &[u8]) -> Option<Vec<Field>> {
    let mut fields = Vec::new();
    while !bytes.is_empty() {
        let tag = varint(&mut bytes)?;
        let value = match tag & 7 {
            0 => Value::Number(varint(&mut bytes)?),
            wire @ (1 | 5) => {
                let (head, rest) = bytes.split_at_checked(if wire == 1 { 8 } else { 4 })?;
                bytes = rest;
                Value::Fixed(head.to_vec())
            }
            2 => {
                let length = usize::try_from(varint(&mut bytes)?).ok()?;
                let (head, rest) = bytes.split_at_checked(length)?;
                bytes = rest;
                let text = std::str::from_utf8(head).ok();
                let is_text = text.is_some_and(|text| !text.chars().any(char::is_control));
                match parse(head).filter(|_| !is_text) {
                    Some(message) => Value::Message(message),
                    None => Value::Bytes(head.to_vec()),
                }
            }
            _ => return None,
        };
        (tag >> 3 > 0).then_some(())?;
        fields.push((tag >> 3, value));
    }
    Some(fields)
}

/// The types of these fields, including those of nested messages.
fn kinds_of(fields: &[Field], kinds: &mut Vec<Kind>) {
    for (_, value) in fields {
        match value {
            Value::Number(_) => kinds.push(Kind::Number),
            Value::Bytes(_) => kinds.push(Kind::Text),
            Value::Fixed(_) => kinds.push(Kind::Other),
            Value::Message(inner) => {
                kinds.push(Kind::Other);
                kinds_of(inner, kinds);
            }
        }
    }
}

fn put((number, value): (u64, &Value), to: &mut Vec<u8>) {
    let tag = |wire: u64, to: &mut Vec<u8>| prost::encoding::encode_varint(number << 3 | wire, to);
    let block = |bytes: &[u8], to: &mut Vec<u8>| {
        tag(2, to);
        prost::encoding::encode_varint(bytes.len() as u64, to);
        to.extend_from_slice(bytes);
    };
    match value {
        Value::Number(value) => {
            tag(0, to);
            prost::encoding::encode_varint(*value, to);
        }
        Value::Fixed(bytes) => {
            tag(if bytes.len() == 8 { 1 } else { 5 }, to);
            to.extend_from_slice(bytes);
        }
        Value::Bytes(bytes) => block(bytes, to),
        Value::Message(fields) => {
            let mut inner = Vec::new();
            fields
                .iter()
                .for_each(|(n, value)| put((*n, value), &mut inner));
            block(&inner, to);
        }
    }
}

/// Writes the fields, and the lie in place of the field that `left` counts down to.
fn change(fields: &[Field], left: &mut usize, what: &LieKind, to: &mut Vec<u8>) {
    for (number, value) in fields {
        let is_it = *left == 0;
        *left = left.wrapping_sub(1);
        if is_it {
            match (what, value) {
                (LieKind::Dropped, _) => {}
                (LieKind::Text(text), Value::Bytes(_)) => {
                    put((*number, &Value::Bytes(text.clone().into_bytes())), to);
                }
                (LieKind::Number(n), Value::Number(_)) => put((*number, &Value::Number(*n)), to),
                (LieKind::Twice, value) => {
                    put((*number, value), to);
                    put((*number, value), to);
                }
                (_, value) => put((*number, value), to),
            }
        } else if let Value::Message(inner) = value {
            let mut changed = Vec::new();
            change(inner, left, what, &mut changed);
            put((*number, &Value::Bytes(changed)), to);
        } else {
            put((*number, value), to);
        }
    }
}

struct Pass {
    liar: Liar,
    path: String,
}

type Answers = Pin<Box<dyn Stream<Item = Result<Vec<u8>, Status>> + Send>>;

impl tower::Service<Request<Streaming<Vec<u8>>>> for Pass {
    type Response = Response<Answers>;
    type Error = Status;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Answers>, Status>> + Send>>;

    fn poll_ready(&mut self, _context: &mut Context<'_>) -> Poll<Result<(), Status>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Streaming<Vec<u8>>>) -> Self::Future {
        let (liar, path) = (self.liar.clone(), self.path.clone());
        Box::pin(async move {
            let (metadata, extensions, questions) = request.into_parts();
            let questions = questions.map_while(Result::ok);
            let request = Request::from_parts(metadata, extensions, questions);
            let mut grpc = tonic::client::Grpc::new(liar.channel.clone());
            let ready = grpc.ready().await;
            ready.map_err(|error| Status::unavailable(error.to_string()))?;
            let method = path.rsplit('/').next().unwrap_or_default().to_string();
            let answers = grpc.streaming(request, path.parse().unwrap(), Raw).await?;
            let answers = answers.into_inner();
            let answers =
                answers.map(move |answer| answer.map(|one| liar.change_answer(&method, one)));
            Ok(Response::new(Box::pin(answers) as Answers))
        })
    }
}

/// Passes messages unchanged.
#[derive(Clone, Copy, Default)]
struct Raw;

impl Codec for Raw {
    type Encode = Vec<u8>;
    type Decode = Vec<u8>;
    type Encoder = Raw;
    type Decoder = Raw;

    fn encoder(&mut self) -> Raw {
        Raw
    }

    fn decoder(&mut self) -> Raw {
        Raw
    }
}

impl Encoder for Raw {
    type Item = Vec<u8>;
    type Error = Status;

    fn encode(&mut self, item: Vec<u8>, to: &mut EncodeBuf<'_>) -> Result<(), Status> {
        to.put_slice(&item);
        Ok(())
    }
}

impl Decoder for Raw {
    type Item = Vec<u8>;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<Vec<u8>>, Status> {
        let mut message = vec![0; from.remaining()];
        from.copy_to_slice(&mut message);
        Ok(Some(message))
    }
}
