//! Extended attributes of open files. Also those of symbolic links: a path in /proc/self/fd leads to the
//! file that is open, and a link that is open is not followed.

use std::ffi::{CStr, CString};
use std::os::fd::{AsFd, AsRawFd};

use nix::errno::Errno;
use nix::libc;

use super::Result;

fn path(file: impl AsFd) -> CString {
    let path = format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
    CString::new(path).unwrap_or_default()
}

/// The names of all attributes; none where the file system has no attributes.
pub fn names(file: impl AsFd) -> Result<Vec<CString>> {
    let path = path(&file);
    let list = read(|buffer, length| {
        // SAFETY: a zero-terminated path, and a buffer of the given length.
        unsafe { libc::listxattr(path.as_ptr(), buffer.cast(), length) }
    });
    let list = match list {
        Err(Errno::EOPNOTSUPP) => Vec::new(),
        other => other?,
    };
    let names = list
        .split(|byte| *byte == 0)
        .filter(|name| !name.is_empty());
    Ok(names.filter_map(|name| CString::new(name).ok()).collect())
}

/// The value of an attribute.
pub fn value(file: impl AsFd, name: &CStr) -> Result<Vec<u8>> {
    let path = path(&file);
    read(|buffer, length| {
        // SAFETY: zero-terminated strings, and a buffer of the given length.
        unsafe { libc::getxattr(path.as_ptr(), name.as_ptr(), buffer.cast(), length) }
    })
}

/// Sets an attribute.
pub fn set(file: impl AsFd, name: &CStr, value: &[u8]) -> Result<()> {
    let path = path(&file);
    // SAFETY: zero-terminated strings, and a value of the given length.
    let done = unsafe {
        libc::setxattr(
            path.as_ptr(),
            name.as_ptr(),
            value.as_ptr().cast(),
            value.len(),
            0,
        )
    };
    Errno::result(done).map(drop)
}

/// Asks for a length, and then for as many bytes. ERANGE if there are more by then.
fn read(call: impl Fn(*mut u8, usize) -> isize) -> Result<Vec<u8>> {
    let length = Errno::result(call(std::ptr::null_mut(), 0))? as usize;
    let mut bytes = vec![0; length];
    if length > 0 {
        let length = Errno::result(call(bytes.as_mut_ptr(), length))?;
        bytes.truncate(length as usize);
    }
    Ok(bytes)
}
