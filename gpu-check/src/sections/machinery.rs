use std::thread;
use std::time::Duration;

use anyhow::{Result, bail};
use tch::{Device, Kind, Tensor};

use crate::context::Context;
use crate::finding::Finding;

pub(super) fn failures(context: &mut Context) -> Result<()> {
    context.check("is not a number", || {
        Ok(Finding::passed().with("figure", f64::NAN))
    })?;
    context.check("is wrong", || Ok(Finding::judged(false, "it is wrong")))?;
    context.check("returns an error", || bail!("the cause"))?;
    context.check("panics", || panic!("out of the blue"))?;
    context.check("causes a warning of libtorch", || {
        let host = Tensor::f_ones([1], (Kind::Float, Device::Cpu))?;
        #[allow(clippy::disallowed_methods, reason = "the warning is what is checked")]
        let _is_pinned = host.f_is_pinned(Device::Cuda(0))?;
        Ok(Finding::passed())
    })?;
    context.check("is skipped", || Ok(Finding::skipped("needs more")))?;
    context.check("ends the process", || {
        eprintln!("the last words");
        std::process::abort()
    })?;
    context.check("runs after it", || Ok(Finding::passed()))
}

pub(super) fn hang(context: &mut Context) -> Result<()> {
    context.check("hangs", || {
        loop {
            thread::sleep(Duration::from_secs(60));
        }
    })
}
