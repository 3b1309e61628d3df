// Boxed calls of any operator of the dispatcher by its schema name, for the operators that tch does not
// generate (`_foreach_*`, `_fused_*`, `_amp_*`, the forward halves of fused attention).
#include "guard.h"
#include "tensors.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <ATen/core/stack.h>

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
      if (kind == c10::TypeKind::DeviceObjType) {
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
                                 size_t n_args, od_outputs** out) noexcept {
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
