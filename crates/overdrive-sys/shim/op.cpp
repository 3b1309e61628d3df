// Boxed calls of any operator of the dispatcher by its schema name, for the operators that tch does not
// generate (`_foreach_*`, `_fused_*`, `_amp_*`, the forward halves of fused attention).
#include "guard.h"
#include "tensors.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <ATen/core/stack.h>

#include <limits>
#include <sstream>

struct od_outputs {
  std::vector<c10::IValue> values;
};

namespace {

using c10::IValue;
using overdrive::as_tensor;
using overdrive::BadArgument;

std::string where(const c10::FunctionSchema& schema, const c10::Argument& argument) {
  std::ostringstream text;
  text << "argument `" << argument.name() << "` of " << schema.operator_name() << " is "
       << argument.type()->repr_str();
  return text.str();
}

const char* tag_name(int32_t tag) {
  static const char* names[] = {"None", "a tensor", "a list of tensors", "an integer", "a float",
                                "a bool", "a list of integers", "a list of floats", "a string",
                                "a list of bools", "a device"};
  return tag >= 0 && tag <= OD_DEVICE ? names[tag] : "an unknown value";
}

// Throws if the argument is an enumeration, which schemas call an integer, and `code` is none of its values:
// libtorch looks values up in tables without a check.
void check_code(int64_t code, const c10::FunctionSchema& schema, const c10::Argument& argument) {
  c10::TypePtr type = argument.real_type();
  if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  int64_t values = 0;
  switch (type->kind()) {
    case c10::TypeKind::ScalarTypeType:
      values = static_cast<int64_t>(at::ScalarType::Undefined);
      break;
    case c10::TypeKind::LayoutType:
      values = static_cast<int64_t>(at::Layout::NumOptions);
      break;
    case c10::TypeKind::MemoryFormatType:
      values = static_cast<int64_t>(at::MemoryFormat::NumOptions);
      break;
    default:
      return;
  }
  if (code < 0 || code >= values) {
    throw BadArgument(where(schema, argument) + ", and has no value " + std::to_string(code));
  }
}

// Converts the value to the type in the schema: integers widen to floats, a list of tensors may become a
// list of optional tensors. For any other mismatch it throws an error with the argument's name.
IValue convert(const od_value& v, const c10::FunctionSchema& schema, const c10::Argument& argument) {
  c10::TypePtr type = argument.type();
  if (auto optional = type->cast<c10::OptionalType>()) {
    if (v.tag == OD_NONE) {
      return IValue();
    }
    type = optional->getElementType();
  }
  const auto kind = type->kind();
  const auto element =
      kind == c10::TypeKind::ListType ? type->expectRef<c10::ListType>().getElementType() : nullptr;
  switch (v.tag) {
    case OD_TENSOR:
      if (kind == c10::TypeKind::TensorType) return as_tensor(v.ptr);
      break;
    case OD_TENSORS: {
      auto handles = static_cast<const at::Tensor* const*>(v.ptr);
      if (element && element->kind() == c10::TypeKind::TensorType) {
        c10::List<at::Tensor> list;
        list.reserve(v.len);
        for (size_t k = 0; k < v.len; ++k) list.push_back(*handles[k]);
        return list;
      }
      if (element && element->kind() == c10::TypeKind::OptionalType) {
        c10::List<std::optional<at::Tensor>> list;
        list.reserve(v.len);
        for (size_t k = 0; k < v.len; ++k) {
          list.push_back(handles[k]->defined() ? std::optional<at::Tensor>(*handles[k]) : std::nullopt);
        }
        return list;
      }
      break;
    }
    case OD_INT:
      check_code(v.i, schema, argument);
      if (kind == c10::TypeKind::FloatType) return static_cast<double>(v.i);
      if (kind == c10::TypeKind::IntType || kind == c10::TypeKind::SymIntType ||
          kind == c10::TypeKind::NumberType) {
        return v.i;
      }
      break;
    case OD_FLOAT:
      if (kind == c10::TypeKind::FloatType || kind == c10::TypeKind::NumberType) return v.f;
      break;
    case OD_BOOL:
      if (kind == c10::TypeKind::BoolType || kind == c10::TypeKind::NumberType) return v.i != 0;
      break;
    case OD_INTS: {
      auto items = static_cast<const int64_t*>(v.ptr);
      if (element && (element->kind() == c10::TypeKind::IntType ||
                      element->kind() == c10::TypeKind::SymIntType)) {
        return c10::List<int64_t>(c10::ArrayRef<int64_t>(items, v.len));
      }
      break;
    }
    case OD_FLOATS: {
      auto items = static_cast<const double*>(v.ptr);
      if (element && element->kind() == c10::TypeKind::FloatType) {
        return c10::List<double>(c10::ArrayRef<double>(items, v.len));
      }
      break;
    }
    case OD_BOOLS: {
      auto items = static_cast<const uint8_t*>(v.ptr);
      if (element && element->kind() == c10::TypeKind::BoolType) {
        c10::List<bool> list;
        for (size_t k = 0; k < v.len; ++k) list.push_back(items[k] != 0);
        return list;
      }
      break;
    }
    case OD_DEVICE:
      if (kind == c10::TypeKind::DeviceObjType &&
          v.len <= static_cast<size_t>(std::numeric_limits<c10::DeviceIndex>::max())) {
        return c10::Device(static_cast<c10::DeviceType>(v.i), static_cast<c10::DeviceIndex>(v.len));
      }
      break;
    case OD_STR:
      if (kind == c10::TypeKind::StringType) return std::string(static_cast<const char*>(v.ptr), v.len);
      break;
    default:
      break;
  }
  throw BadArgument(where(schema, argument) + ", got " + tag_name(v.tag));
}

// Returns true if equal offsets in memory mean equal indices, and all elements lie in the storages.
bool same_memory_layout(const at::Tensor& tensor, const at::Tensor& like) {
  if (!tensor.defined() || tensor.layout() != at::kStrided || !tensor.has_storage() || tensor.is_neg() ||
      tensor.is_conj() || !tensor.is_non_overlapping_and_dense() || tensor.sizes() != like.sizes() ||
      tensor.scalar_type() != like.scalar_type() || tensor.device() != like.device()) {
    return false;
  }
  for (int64_t k = 0; k < tensor.dim(); ++k) {
    if (tensor.size(k) > 1 && tensor.stride(k) != like.stride(k)) return false;
  }
  return overdrive::holds_elements(tensor);
}

// Checks the arguments of a fused optimizer, whose kernels walk all lists by the offsets of the first one.
void check_fused(const c10::FunctionSchema& schema, const torch::jit::Stack& stack) {
  const auto& arguments = schema.arguments();
  const auto require = [&](bool fits, size_t k, const char* expected) {
    if (fits) return;
    throw BadArgument("argument `" + arguments[k].name() + "` of " + schema.name() + " must be " + expected);
  };
  const auto is_number = [](const at::Tensor& tensor, const at::Tensor& like) {
    return tensor.defined() && tensor.layout() == at::kStrided && tensor.numel() == 1 &&
           tensor.scalar_type() == at::kFloat && tensor.device() == like.device();
  };
  const auto first = stack.at(0).toTensorVector();
  require(!first.empty(), 0, "at least one tensor");
  // Lists that may be absent otherwise.
  bool amsgrad = false, momentum = false;
  for (size_t k = 0; k < stack.size(); ++k) {
    if (arguments[k].name() == "amsgrad") amsgrad = stack[k].toBool();
    if (arguments[k].name() == "momentum") momentum = stack[k].toDouble() != 0.0;
  }
  for (size_t k = 0; k < stack.size(); ++k) {
    const auto& name = arguments[k].name();
    if (stack[k].isTensor()) {
      const auto& tensor = stack[k].toTensor();
      require(name == "lr" ? tensor.defined() && tensor.numel() == 1 : is_number(tensor, first[0]), k,
              "one float on the device of the parameters");
    }
    if (!stack[k].isTensorList()) continue;
    const auto list = stack[k].toTensorVector();
    const bool unused =
        (name == "max_exp_avg_sqs" && !amsgrad) || (name == "momentum_buffer_list" && !momentum);
    if (unused && list.empty()) continue;
    require(list.size() == first.size(), k, "as long as the list of parameters");
    for (size_t n = 0; n < list.size(); ++n) {
      if (name == "state_steps") {
        require(is_number(list[n], first[n]), k, "one float for each parameter, on its device");
      } else {
        require(same_memory_layout(list[n], first[n]), k,
                "tensors with the shapes, strides, dtypes and devices of the parameters, without gaps, in "
                "their storage");
      }
    }
  }
}

c10::OperatorHandle find(const char* name, const char* overload) {
  auto found = c10::Dispatcher::singleton().findSchema({name, overload});
  if (!found) {
    throw overdrive::NotFound(std::string("libtorch has no operator `") + name +
                              (*overload ? std::string(".") + overload : "") +
                              "` (names look like `aten::mul`, overloads like `Tensor`)");
  }
  return *found;
}

const IValue& output_at(const od_outputs* outputs, size_t index) {
  if (index >= outputs->values.size()) {
    throw BadArgument("output " + std::to_string(index) + " of " +
                      std::to_string(outputs->values.size()));
  }
  return outputs->values[index];
}

}  // namespace

extern "C" od_status* od_op_call(const char* name, const char* overload, const od_value* args,
                                 size_t n_args, int32_t fused, od_outputs** out) noexcept {
  return overdrive::guard([&] {
    auto op = find(name, overload);
    const auto& schema = op.schema();
    const auto& arguments = schema.arguments();
    if (n_args > arguments.size()) {
      std::ostringstream text;
      text << n_args << " arguments given to " << schema;
      throw BadArgument(text.str());
    }
    torch::jit::Stack stack;
    stack.reserve(arguments.size());
    for (size_t k = 0; k < arguments.size(); ++k) {
      if (k < n_args) {
        stack.push_back(convert(args[k], schema, arguments[k]));
      } else if (arguments[k].default_value()) {
        stack.push_back(*arguments[k].default_value());
      } else {
        throw BadArgument(where(schema, arguments[k]) + " and has no default: it must be given");
      }
    }
    if (fused) check_fused(schema, stack);
    op.callBoxed(stack);
    *out = new od_outputs{std::move(stack)};
  });
}

extern "C" od_status* od_op_schema(const char* name, const char* overload, char** out) noexcept {
  return overdrive::guard([&] {
    std::ostringstream text;
    text << find(name, overload).schema();
    *out = overdrive::copy_string(text.str());
  });
}

extern "C" size_t od_outputs_len(const od_outputs* outputs) noexcept { return outputs->values.size(); }

extern "C" od_status* od_outputs_get(const od_outputs* outputs, size_t index, od_value* out) noexcept {
  return overdrive::guard([&] {
    const IValue& value = output_at(outputs, index);
    od_value result{OD_NONE, 0, 0.0, nullptr, 0};
    if (value.isTensor()) {
      result.tag = OD_TENSOR;
    } else if (value.isTensorList()) {
      result.tag = OD_TENSORS;
      result.len = value.toTensorList().size();
    } else if (value.isInt()) {
      result.tag = OD_INT;
      result.i = value.toInt();
    } else if (value.isDouble()) {
      result.tag = OD_FLOAT;
      result.f = value.toDouble();
    } else if (value.isBool()) {
      result.tag = OD_BOOL;
      result.i = value.toBool();
    } else if (!value.isNone()) {
      throw BadArgument("output " + std::to_string(index) + " has type " + value.type()->repr_str() +
                        ", which has no Rust form");
    }
    *out = result;
  });
}

extern "C" od_status* od_outputs_tensor(const od_outputs* outputs, size_t index, size_t element,
                                        od_tensor* out) noexcept {
  return overdrive::guard([&] {
    const IValue& value = output_at(outputs, index);
    *out = new at::Tensor(value.isTensorList() ? value.toTensorList().get(element) : value.toTensor());
  });
}

extern "C" void od_outputs_free(od_outputs* outputs) noexcept { delete outputs; }
