//! Generates the CSI messages and services from `proto/csi.proto`, and those between router and
//! agents from `proto/agent.proto`, without protoc.
//!
//! prost's derived `Debug` prints secrets. So every message with a field that CSI marks
//! `csi_secret`, with a `volume_context` (the kubelet may put a token there) or with `mount_flags`
//! (they may be sensitive), gets a `Debug` from here. The fields are found in the compiled
//! descriptor, so a new one cannot be forgotten.

#![expect(
    clippy::disallowed_methods,
    reason = "a build script writes its output"
)]

use std::error::Error;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::{env, fs};

use prost_reflect::{DescriptorPool, FieldDescriptor, MessageDescriptor, Value};

const PROTO: &str = "csi.proto";
const AGENT_PROTO: &str = "agent.proto";
const PACKAGE: &str = "csi.v1";

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=proto");
    if env::var_os("CARGO_FEATURE_FAULT").is_some() {
        // Tests in a guest kernel start the programs hundreds of times. There, each page that is
        // relocated takes as long as ten system calls.
        println!("cargo::rustc-link-arg-bins=-no-pie");
    }
    let out = PathBuf::from(env::var("OUT_DIR")?);

    let mut compiler = protox::Compiler::new(["proto"])?;
    compiler
        .include_imports(true)
        .include_source_info(true)
        .open_file(PROTO)?;
    let pool = compiler.descriptor_pool();
    let hidden: Vec<_> = messages(&pool).filter(needs_redaction).collect();

    tonic_prost_build::configure()
        .generate_default_stubs(true)
        .skip_debug(hidden.iter().map(|m| format!(".{}", m.full_name())))
        .compile_fds(compiler.file_descriptor_set())?;

    fs::write(
        out.join("csi.debug.rs"),
        hidden.iter().map(debug_impl).collect::<String>(),
    )?;
    fs::write(out.join("csi.formatters.rs"), formatters(&pool))?;
    // The comments are not needed at run time.
    compiler.include_source_info(false);
    fs::write(
        out.join("csi.descriptor.bin"),
        compiler.encode_file_descriptor_set(),
    )?;

    let mut agent = protox::Compiler::new(["proto"])?;
    agent.include_imports(true).open_file(AGENT_PROTO)?;
    tonic_prost_build::configure()
        .generate_default_stubs(true)
        .compile_fds(agent.file_descriptor_set())?;
    fs::write(
        out.join("agent.descriptor.bin"),
        agent.encode_file_descriptor_set(),
    )?;
    Ok(())
}

fn messages(pool: &DescriptorPool) -> impl Iterator<Item = MessageDescriptor> + '_ {
    pool.all_messages()
        .filter(|m| m.package_name() == PACKAGE && !m.is_map_entry())
}

fn needs_redaction(message: &MessageDescriptor) -> bool {
    message
        .fields()
        .any(|field| is_secret(&field) || is_context(&field) || is_sensitive(&field))
}

fn is_secret(field: &FieldDescriptor) -> bool {
    let options = field.options();
    options.extensions().any(|(extension, value)| {
        extension.full_name() == "csi.v1.csi_secret" && *value == Value::Bool(true)
    })
}

fn is_context(field: &FieldDescriptor) -> bool {
    field.name() == "volume_context"
}

/// According to the text of CSI, mount flags may be sensitive, although they are not marked.
fn is_sensitive(field: &FieldDescriptor) -> bool {
    field.name() == "mount_flags"
}

/// Generates `Debug` for one message. A type that is not supported here fails the build.
fn debug_impl(message: &MessageDescriptor) -> String {
    let (name, path) = (message.name(), rust_path(message));
    assert!(
        message.oneofs().len() == 0,
        "{name} has a oneof, which its Debug doesn't print yet"
    );
    let mut fields = String::new();
    for field in message.fields() {
        let f = field.name();
        let value = match (is_secret(&field), is_context(&field)) {
            (false, false) if !is_sensitive(&field) => format!("self.{f}"),
            (true, _) if field.is_map() => format!("Secrets(self.{f}.len())"),
            (_, false) if is_sensitive(&field) => format!("Secrets(self.{f}.len())"),
            (_, true) if field.is_map() => format!("Context(&self.{f})"),
            _ => panic!("{name}.{f} is to be redacted but is no map"),
        };
        write!(fields, "\n            .field({f:?}, &{value})").expect("a String takes all");
    }
    format!(
        "impl ::std::fmt::Debug for {path} {{
    fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {{
        f.debug_struct({name:?}){fields}
            .finish()
    }}
}}
"
    )
}

/// The Rust path of a message: prost puts nested ones into a module named after the outer one.
fn rust_path(message: &MessageDescriptor) -> String {
    let Some(outer) = message.parent_message() else {
        return message.name().to_owned();
    };
    assert!(
        outer.parent_message().is_none(),
        "{} is nested twice",
        message.name()
    );
    let mut module = String::new();
    for c in outer.name().chars() {
        if c.is_uppercase() && !module.is_empty() {
            module.push('_');
        }
        module.extend(c.to_lowercase());
    }
    format!("{module}::{}", message.name())
}

/// For the tests: for each message by name, a function that decodes and prints it.
fn formatters(pool: &DescriptorPool) -> String {
    let mut arms = String::new();
    for message in messages(pool).filter(|m| m.parent_message().is_none()) {
        let name = message.name();
        writeln!(arms, "    ({name:?}, format_as::<super::{name}>),").expect("a String takes all");
    }
    format!("&[\n{arms}]")
}
